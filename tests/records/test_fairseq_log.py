"""The records of fairseq's training logs: formats, resumed and repeated trainings, lines that are cut off."""

import json
from types import SimpleNamespace

import pytest

from lightconv_plugin.records.fairseq_log import records_of_log
from lightconv_plugin.records.trainings import is_finished, last_start, trainings

PREFIXES = {
    "fairseq-train": "2026-11-20 10:52:58 | INFO | {tag} | ",
    "hydra": "[2026-11-20 10:52:58,126][{tag}][INFO] - ",
    "none": "",
}


def parse_log(text):
    """The trainings in a log, and the number of its truncated records."""
    records, broken = records_of_log(text)
    return SimpleNamespace(trainings=trainings(records), broken=broken, records=records)


class Writer:
    """Writes a log line by line, in one of fairseq's formats behind one of its prefixes."""

    def __init__(self, style: str = "simple", prefix: str = "hydra"):
        self.style, self.prefix, self.lines = style, PREFIXES[prefix], []

    def add(self, tag: str, text: str) -> "Writer":
        self.lines.append(self.prefix.format(tag=tag) + text)
        return self

    def head(self, parameters: int = 2493440, loaded: int | None = None) -> "Writer":
        self.add("fairseq_cli.train", f"num. shared model params: {parameters:,} (num. trained: {parameters:,})")
        self.add("fairseq_cli.train", "num. expert model params: 0 (num. trained: 0)")
        self.add("fairseq.data.data_utils", "loaded 1,014 examples from: /some where/data-bin/valid.en-de.en")
        self.add("fairseq_cli.train", "training on 1 devices (GPUs/TPUs)")
        if loaded is None:
            return self.add("fairseq.trainer", "No existing checkpoint found runs/a/checkpoint_last.pt")
        return self.add("fairseq.trainer", f"Loaded checkpoint runs/a/checkpoint_last.pt (epoch 5 @ {loaded} updates)")

    def inner(self, update: int, loss: float, epoch: int = 1, wall: int = 0, **more) -> "Writer":
        stats = {
            "loss": loss,
            "ppl": 2**loss,
            "wps": 100,
            "wpb": 50,
            "num_updates": update,
            "lr": 0.001,
            "wall": wall,
            **more,
        }
        if self.style == "json":
            return self.add("train_inner", json.dumps({"epoch": epoch, "update": 0.5, **_strings(stats)}))
        text = ", ".join(f"{key}={value}" for key, value in stats.items())
        return self.add("train_inner", f"epoch {epoch:03d}: {update:6d} / 124 {text}")

    def epoch(self, update: int, loss: float, epoch: int = 1, wall: int = 0) -> "Writer":
        return self._end("train", epoch, {"loss": loss, "num_updates": update, "wall": wall})

    def valid(self, update: int, loss: float, epoch: int = 1, subset: str = "valid", **more) -> "Writer":
        return self._end(subset, epoch, {"loss": loss, "ppl": 2**loss, **more, "num_updates": update})

    def _end(self, tag: str, epoch: int, stats: dict) -> "Writer":
        if self.style == "json":
            return self.add(tag, json.dumps({"epoch": epoch, **{f"{tag}_{k}": v for k, v in _strings(stats).items()}}))
        middle = "" if tag == "train" else f"valid on '{tag}' subset | "
        return self.add(tag, f"epoch {epoch:03d} | {middle}" + " | ".join(f"{k} {v}" for k, v in stats.items()))

    def parse(self, end: str = "\n"):
        return parse_log("\n".join(self.lines) + end)


def _strings(stats: dict) -> dict:
    """fairseq's json format has numbers as strings."""
    return {key: str(value) for key, value in stats.items()}


def points(records, name="loss"):
    return [(record.update, record.values[name]) for record in records]


@pytest.mark.parametrize(
    "style, prefix",
    [
        *(("simple", prefix) for prefix in PREFIXES),
        ("json", "fairseq-train"),
        ("json", "hydra"),
    ],
)
def test_every_format_gives_the_same_curves(style, prefix):
    log = Writer(style, prefix).head().inner(20, 9.5, wall=7).inner(40, 8.5, wall=14)
    log.valid(50, 8.25, bleu=1.5).epoch(50, 9.0, wall=20).inner(60, 7.5, epoch=2, wall=27)
    parsed = log.parse()
    assert parsed.broken == 0
    (training,) = parsed.trainings
    assert points(training.train) == [(20, 9.5), (40, 8.5), (60, 7.5)]
    assert points(training.part("valid")) == [(50, 8.25)]
    assert points(training.part("valid"), "bleu") == [(50, 1.5)]
    assert training.subsets == ["valid"]
    assert training.train[0].values["lr"] == 0.001
    assert (training.parameters, training.updates, training.seconds) == (2493440, 60, 27)
    assert training.devices == ["1 process on a CPU"]
    assert training.sentences == {"valid": 1014}


@pytest.mark.parametrize("style", ["simple", "json"])
def test_a_resumed_training_is_one_curve_without_what_was_thrown_away(style):
    log = Writer(style).head().inner(20, 9, wall=10).inner(40, 8, wall=20).valid(50, 7).inner(110, 6, 3, wall=30)
    log.head(loaded=50).inner(70, 5.5, 2, wall=9).valid(100, 5, 2).inner(120, 4, 3, wall=21)
    (training,) = log.parse().trainings
    assert points(training.train) == [(20, 9), (40, 8), (70, 5.5), (120, 4)]
    assert points(training.part("valid")) == [(50, 7), (100, 5)]
    assert [stretch.start for stretch in training.stretches] == [0, 50]
    assert training.seconds == 20 + 21


def test_the_time_of_a_training_that_stock_fairseq_resumed_is_not_known():
    log = Writer().head().inner(20, 9, wall=10).inner(40, 8, wall=20).valid(40, 7)
    log.head(loaded=40).inner(60, 6, 2, wall=0).inner(80, 5, 2, wall=0)
    (training,) = log.parse().trainings
    assert training.seconds is None and training.updates == 80


def test_resumed_twice_from_the_same_checkpoint():
    log = Writer().head().inner(40, 8).valid(50, 7)
    log.head(loaded=50).inner(60, 1, 2)
    log.head(loaded=50).inner(60, 2, 2).inner(80, 3, 2)
    (training,) = log.parse().trainings
    assert points(training.train) == [(40, 8), (60, 2), (80, 3)]


def test_a_start_that_came_to_nothing_leaves_no_trace():
    log = Writer().head().inner(40, 8)
    log.head(loaded=40)  # killed before the first update
    log.head(parameters=7).inner(20, 5)
    first, second = log.parse().trainings
    assert points(first.train) == [(40, 8)]
    assert points(second.train) == [(20, 5)]
    assert (first.parameters, second.parameters) == (2493440, 7)
    assert [stretch.start for stretch in second.stretches] == [0]


def test_several_trainings_in_one_log_are_kept_apart():
    log = Writer().head().inner(20, 9).inner(40, 8).head(parameters=5).inner(20, 7).inner(40, 6)
    parsed = log.parse()
    assert [points(training.train) for training in parsed.trainings] == [[(20, 9), (40, 8)], [(20, 7), (40, 6)]]


def test_a_log_without_heads_begins_anew_where_the_numbers_fall():
    log = Writer(prefix="none").inner(20, 9).inner(40, 8).inner(20, 7).inner(40, 6)
    assert [points(t.train) for t in log.parse().trainings] == [[(20, 9), (40, 8)], [(20, 7), (40, 6)]]
    log = Writer(prefix="none").inner(220, 9, 2).inner(240, 8, 2).inner(260, 8, 2).inner(240, 7, 2)
    assert [points(t.train) for t in log.parse().trainings] == [[(220, 9), (240, 7)]]


@pytest.mark.parametrize("style", ["simple", "json"])
def test_a_cut_line_is_counted_and_left_out(style):
    whole = Writer(style).head().inner(20, 9).inner(124, 8).valid(124, 7).lines
    for length in range(whole[-1].index("epoch") + 40, len(whole[-1])):
        parsed = parse_log("\n".join([*whole[:-1], whole[-1][:length]]))
        assert parsed.trainings[0].subsets == [], whole[-1][:length]
        assert parsed.broken == 1
        assert parsed.trainings[0].updates == 124


def test_a_cut_line_that_the_next_start_is_written_behind():
    log = Writer(prefix="fairseq-train").head().inner(20, 9).inner(40, 8)
    cut = log.lines.pop()[: -len("000, lr=0.001, wall=0")]
    text = (
        "\n".join(log.lines)
        + "\n"
        + cut
        + "\n".join(Writer(prefix="fairseq-train").head(loaded=20).inner(30, 7).lines)
        + "\n"
    )
    (training,) = parse_log(text).trainings
    assert points(training.train) == [(20, 9), (30, 7)]


def test_a_progress_bar_before_a_record_is_not_part_of_it():
    bar = "epoch 001:  10%|#   | 12/124 [00:01<00:09, loss=3, num_updates=7]\r"
    log = Writer(prefix="none")
    log.lines.append(bar * 3 + "epoch 001 | loss 5.5 | num_updates 124 | lr 0.1\r")
    (training,) = log.parse().trainings
    assert points(training.train) == [(124, 5.5)]


def test_several_validation_sets_and_what_is_not_finite():
    log = Writer("json").head().inner(20, 9).valid(20, 5).valid(20, 6, subset="valid1").inner(40, float("nan"))
    (training,) = log.parse().trainings
    assert training.subsets == ["valid", "valid1"]
    assert points(training.part("valid1")) == [(20, 6)]
    assert [update for update, _ in points(training.train)] == [20, 40]


def test_speed_is_all_tokens_over_all_their_time():
    log = Writer().head()
    log.inner(10, 9, wps=100, wpb=50)  # 500 tokens in 5 s
    log.inner(30, 8, wps=400, wpb=50)  # 1000 tokens in 2.5 s
    log.head(loaded=30).inner(40, 7, 2, wps=0)  # the first after a start may have no speed
    (training,) = log.parse().trainings
    assert training.tokens_per_second == pytest.approx(1500 / 7.5)


@pytest.mark.parametrize("text", ["", "\n", "hello\n", "epoch 3 | of my diary | it rains\n", '{"epoch": 1}\n'])
def test_what_is_no_log_has_no_trainings(text):
    assert parse_log(text).trainings == [] and parse_log(text).broken == 0


@pytest.mark.parametrize(
    "processes, threads, lines, said",
    [
        (1, None, [], "1 process on a CPU"),
        (1, 1, ["operators on cpu tensors: backend cpu (a)"], "1 process on a CPU, 1 thread; operators: cpu backend"),
        (2, 4, [], "2 processes on CPUs, 4 threads each"),
        (1, 16, ["rank   0: capabilities =  9.0  ; total memory = 139.719 GB ; name = NVIDIA H200                   ",
                 "operators on cuda tensors: backend cuda (lib.so)"], "1 × NVIDIA H200; operators: cuda backend"),
        (2, None, [f"rank   {n}: capabilities =  9.0  ; total memory = 1 GB ; name = NVIDIA H200" for n in (0, 1)],
         "2 × NVIDIA H200"),
        (4, None, ["operators on cuda tensors: backend cuda (lib.so)"], "4 processes on GPUs; operators: cuda backend"),
    ],
)  # fmt: skip
def test_what_it_ran_on(processes, threads, lines, said):
    log = Writer()
    if threads:
        log.add("x", f"checkpoints and log: runs/a ({processes} × {threads} threads)")
    log.head()
    log.lines[-2] = f"training on {processes} devices (GPUs/TPUs)"
    for line in lines:
        log.add("x", line)
    (training,) = log.inner(20, 9).parse().trainings
    assert training.devices == [said]


def test_restarted_with_the_same_threads():
    log = Writer().add("x", "checkpoints and log: runs/a (1 × 4 threads)").head().inner(20, 9)
    (training,) = log.head(loaded=20).inner(40, 8).parse().trainings
    assert training.devices == ["1 process on a CPU, 4 threads"]


def test_resumed_on_another_machine():
    gpu = "rank   0: capabilities =  9.0  ; total memory = 139.719 GB ; name = NVIDIA H200"
    log = Writer().head().inner(20, 9).head(loaded=20).add("x", gpu)  # killed before the first update
    log.head(loaded=20).add("x", gpu).inner(40, 8).head(loaded=40).add("x", gpu).inner(60, 8)
    (training,) = log.parse().trainings
    assert training.devices == ["1 process on a CPU", "1 × NVIDIA H200"]


def test_an_epoch_that_was_interrupted_and_repeated_counts_once():
    log = Writer()

    def epoch(update, number, speed, seconds):
        end = f"epoch {number:03d} | loss 9.1 | wps {speed} | ups 1 | train_wall {seconds} | num_updates {update}"
        log.add("train", end)

    log.head()
    epoch(50, 1, 3000, 50)
    epoch(90, 2, 1000, 99)
    log.head(loaded=50)
    epoch(100, 2, 5000, 30)
    (training,) = log.parse().trainings
    assert (training.parameters, training.epoch_speed, training.update_seconds) == (2493440, 4000.0, 80.0)


def test_without_an_epoch_speed_and_time_are_not_known():
    (training,) = Writer().head().inner(20, 9).parse().trainings
    assert training.epoch_speed is None and training.update_seconds is None


def test_the_facts_of_the_last_start():
    log = Writer()
    gpu = "rank   {}: capabilities =  9.0  ; total memory = 1 GB ; name = NVIDIA {}   "
    for name, numbers in (("A100", (0,)), ("H100", (10, 2))):
        log.add("fairseq_cli.train", "{'_name': None,").add("fairseq.tasks.translation", "[de] dictionary: 4,056 types")
        for number in numbers:
            log.add("fairseq.utils", gpu.format(number, f"{name} {number}"))
        log.head().inner(20, 9)
    start = last_start(log.parse().records)
    assert start["gpus"] == ["NVIDIA H100 2", "NVIDIA H100 10"]
    assert start["dictionaries"] == {"de": 4056} and start["texts"] == {"valid.en-de.en": 1014}
    assert (start["parameters"], start["processes"], start["update"]) == (2493440, 1, 0)


def test_a_dictionary_without_a_language():
    assert last_start(Writer().add("x", "dictionary: 12 types").parse().records)["dictionaries"] == {"": 12}


@pytest.mark.parametrize("prefix", ["fairseq-train", "hydra"])
def test_a_training_is_finished_if_its_last_start_came_to_an_end(prefix):
    log = Writer(prefix=prefix).add("fairseq_cli.train", "{'_name': None,").head().inner(20, 9)
    assert not is_finished(log.parse().records)
    log.add("fairseq_cli.train", "done training in 3.0 seconds")
    assert is_finished(log.parse().records)
    log.add("fairseq_cli.train", "{'_name': None,")
    assert not is_finished(log.parse().records)
