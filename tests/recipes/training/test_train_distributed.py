"""train.sh with several processes and machines, on the CPU; what happens when it is killed, and what it leaves behind.

Every training takes the same 40 updates of some 80 tokens. Where it is ended from outside, that is after the checkpoint
of the last of them.
"""

import os
import shutil
import signal
import socket
import sys

import pytest

from lightconv_plugin.records.file import FILE, read_folder
from lightconv_plugin.records.trainings import is_finished, trainings
from tests.recipes.conftest import ROOT, script_environment
from tests.recipes.training.trainings import (
    ENDLESS,
    NO_DROPOUT,
    UPDATES,
    Training,
    assert_equal,
    assert_nothing_left,
    state,
    write_config,
)
from tests.warm_python import warm_python


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """The configuration's file; trainings go to folders beside it."""
    return write_config(tmp_path_factory.mktemp("trainings"))


def losses(save_dir, tag="train_inner"):
    """Update -> loss, from TensorBoard's files; of what was computed twice, the second."""
    loading = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    found = {}
    for path in sorted((save_dir / "tensorboard" / tag).glob("events.out.tfevents.*")):
        for event in loading.EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.tag == "loss":
                    found[event.step] = value.tensor.float_val[0] if value.tensor.float_val else value.simple_value
    return found


@pytest.fixture(scope="module")
def one(config):
    """One process, two batches an update, no dropout; ended by Ctrl-C."""
    training = Training(config, "one", *NO_DROPOUT, ENDLESS, python=warm_python())
    training.checkpoint(UPDATES)
    assert len(training.workers()) == 1
    assert training.signalled(signal.SIGINT) == 128 + signal.SIGINT
    assert_nothing_left(training.save_dir)
    return training


@pytest.fixture(scope="module")
def two(config):
    """Two processes, a batch each, no dropout; ended by SIGTERM."""
    training = Training(config, "two", "--processes", "2", *NO_DROPOUT, ENDLESS, python=warm_python())
    training.checkpoint(UPDATES)
    assert sorted(training.workers()) == [0, 1]
    assert training.signalled(signal.SIGTERM) == 128 + signal.SIGTERM
    assert_nothing_left(training.save_dir)
    return training


@pytest.fixture(scope="module")
def with_dropout(config):
    """One process; torchrun is killed in the end, which the kernel tells its child: no warm process has that parent."""
    training = Training(config, "with dropout", ENDLESS)
    training.checkpoint(UPDATES)
    training.process.kill()
    training.end()
    assert_nothing_left(training.save_dir, seconds=20)
    return training


def test_two_processes_equal_two_batches_an_update(one, two):
    """fairseq deals the batches of an epoch out in turn: both take the same two for the same update.

    Without dropout, whose masks are drawn for each batch by the number of the update and not that of the process.
    """
    assert "1 process × 40 × update_freq 2 = 80" in one.output
    assert "2 processes × 40 × update_freq 1 = 80" in two.output
    first, second = state(one.checkpoint(UPDATES)), state(two.checkpoint(UPDATES))
    assert first.pop("place")["iterations_in_epoch"] == 2 * second.pop("place")["iterations_in_epoch"]
    assert_equal(second, first, rtol=1e-4, atol=1e-6)
    mine, other = losses(two.save_dir), losses(one.save_dir)
    numbers = range(1, UPDATES + 1)
    assert [mine[n] for n in numbers] == pytest.approx([other[n] for n in numbers], abs=2e-3)
    assert mine[1] > mine[UPDATES] > 1


def test_two_processes_resume_where_they_were_stopped(config, two):
    stopped_at, folder = 32, config.parent / "resumed"  # in the middle of an epoch
    folder.mkdir()
    shutil.copy(two.checkpoint(stopped_at), folder / "checkpoint_last.pt")
    training = Training(config, folder.name, "--processes", "2", *NO_DROPOUT, python=warm_python())
    assert training.end() and training.process.returncode == 0, training.output[-5000:]
    assert training.output.count("Loaded checkpoint") == 1
    starts = [record["update"] for record in read_folder(folder).records if record["record"] == "start"]
    assert starts == [stopped_at]
    assert_equal(state(folder / "checkpoint_last.pt"), state(two.checkpoint(UPDATES)))
    assert_nothing_left(folder)


def test_tensorboard_has_the_losses(one):
    """To the three decimals of the log, of training and validation."""
    logged = dict(
        line.split(" loss=")[1].split(",")[0] and (int(line.split("num_updates=")[1].split(",")[0]), line)
        for line in one.output.splitlines()
        if "train_inner" in line and "num_updates=" in line
    )
    # Of an update after these, the signal may come between the one and the other.
    found = {update: loss for update, loss in losses(one.save_dir).items() if update <= UPDATES}
    assert {*range(1, UPDATES + 1)} == found.keys() <= logged.keys()
    for update, loss in found.items():
        assert float(logged[update].split(" loss=")[1].split(",")[0]) == pytest.approx(loss, abs=1e-5)
    assert {4, 8, 12} <= losses(one.save_dir, "valid").keys()


def test_the_signals_are_named(one, two):
    for training, name in (two, "SIGTERM"), (one, "SIGINT"):
        last = training.output.splitlines()[-1]
        assert last == f"lightconv train: ended by {name}; rerun the same command to resume from the last checkpoint"
        assert "Traceback" not in training.output


def test_the_first_of_two_processes_records_and_the_signal_is_the_end(two):
    found = read_folder(two.save_dir)
    assert found.file == FILE and found.broken == 0
    assert [record["record"] for record in found.records if record["record"] in ("start", "end")] == ["start", "end"]
    assert found.records[0]["processes"] == 2 and not is_finished(found.records)
    assert found.records[-1]["error"].startswith("ended by SIGTERM; rerun the same command")
    (training,) = trainings(found.records)
    updates = [record.update for record in training.train]
    assert updates == list(range(1, len(updates) + 1)) and len(updates) >= UPDATES, "each update once"


def test_a_killed_process_is_started_again(config, with_dropout):
    """One process, killed in the middle of an epoch; dropout on, and the next batches already read."""
    training = Training(config, "killed", "--max-restarts", "1", python=warm_python())
    training.checkpoint(4)
    os.kill(training.workers()[0], signal.SIGKILL)
    assert training.end() and training.process.returncode == 0, training.output[-5000:]
    assert "exitcode: -9" in training.output
    assert "lightconv train: a process died: restart 1 of 1, from the last checkpoint" in training.output
    assert training.output.count("Loaded checkpoint") == 1
    assert_equal(state(training.save_dir / "checkpoint_last.pt"), state(with_dropout.checkpoint(UPDATES)))
    assert_nothing_left(training.save_dir)
    assert (training.save_dir / "train.log").read_text(encoding="utf-8") in training.output
    records = read_folder(training.save_dir).records
    starts = [record["update"] for record in records if record["record"] == "start"]
    assert len(starts) == 2 and starts[0] == 0 < starts[1] and is_finished(records)
    assert [record.update for record in trainings(records)[0].train] == list(range(1, UPDATES + 1))


@pytest.mark.long
def test_a_process_that_stops_answering_counts_as_dead(config, two):
    """Process 1 is frozen for longer than --timeout: process 0 gives up, and both go on from the last checkpoint."""
    training = Training(config, "frozen", "--processes", "2", "--timeout", "10", *NO_DROPOUT)
    training.checkpoint(4)
    frozen = training.workers()[1]
    os.kill(frozen, signal.SIGSTOP)
    training.wait_for("lightconv train: error: process 0: no response from a peer process after 10 s", seconds=100)
    os.kill(frozen, signal.SIGCONT)  # as if its machine came back: torchrun's SIGTERM ends it now and not 30 s later
    assert training.end() and training.process.returncode == 0, training.output[-5000:]
    assert "lightconv train: a process died: restart 1 of 3, from the last checkpoint" in training.output
    assert "Traceback" not in training.output
    assert_equal(state(training.save_dir / "checkpoint_last.pt"), state(two.checkpoint(UPDATES)))
    assert_nothing_left(training.save_dir)


SRUN = """#!/usr/bin/env bash
# Two "machines" on this one. As Slurm's: every task has its number, and a failure is the step's.
while [[ $1 == --* ]]; do shift; done
SLURM_NODEID=0 "$@" & first=$!
SLURM_NODEID=1 "$@" & second=$!
wait "$first"; status=$?
wait "$second" && exit "$status"
"""


@pytest.mark.long
def test_two_machines_under_slurm_survive_a_killed_process(config, two, tmp_path):
    programs, spool = tmp_path / "bin", tmp_path / "spool"
    programs.mkdir()
    spool.mkdir()
    (programs / "srun").write_text(SRUN, encoding="utf-8")
    (programs / "scontrol").write_text(
        '#!/bin/sh\n[ "$*" = "show hostnames here[1-2]" ] && printf "localhost\\nlocalhost\\n"\n'
    )
    for path in programs.iterdir():
        path.chmod(0o755)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    training = Training(
        config,
        "machines",
        *NO_DROPOUT,
        # sbatch runs a copy
        script=shutil.copy(ROOT / "scripts/slurm_train.sh", spool / "slurm_script"),
        PATH=f"{programs}:{os.environ['PATH']}",
        **{"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "here[1-2]", "SLURM_NNODES": "2"},
        **{"SLURM_SUBMIT_DIR": str(ROOT), "RENDEZVOUS_PORT": str(port)},
    )
    training.checkpoint(4)
    workers = training.workers()
    assert sorted(workers) == [0, 1]
    os.kill(workers[1], signal.SIGKILL)
    assert training.end() and training.process.returncode == 0, training.output[-5000:]
    assert "2 processes × 40 × update_freq 1 = 80" in training.output
    assert "from the last checkpoint" in training.output
    assert training.output.count("Loaded checkpoint") == 1
    assert_equal(state(training.save_dir / "checkpoint_last.pt"), state(two.checkpoint(UPDATES)))
    assert_nothing_left(training.save_dir)
    log = (training.save_dir / "train.log").read_text(encoding="utf-8")
    assert log.count("done training") == 1 and f"num_updates={UPDATES}," in log
    killed = [(training.save_dir / f"train.node{rank}.log").read_text(encoding="utf-8") for rank in (0, 1)]
    assert "exitcode: -9" in "".join(killed)


def test_an_error_of_the_configuration_ends_it_at_once(config):
    options = ("--max-restarts", "2", "common.fp16=true")
    training = Training(config, "wrong", *options, python=warm_python(), CUDA_VISIBLE_DEVICES="")
    output = training.end()
    assert training.process.returncode == 1
    message = "error: process 0: common.fp16 (--fp16) needs a GPU, and torch sees none"
    assert output.count(message) == 1 and "Traceback" not in output  # it was read once
    assert output.count("failed (exitcode: 1)") == 1, "torchrun started it once"
    why = "not restarted, since another start would fail in the same way"
    assert output.splitlines()[-1] == f"lightconv train: error: a process died (see above); {why}"
    assert_nothing_left(training.save_dir)


def test_slurm_train_outside_slurm_and_the_checkout(run_script, tmp_path):
    assert "sbatch scripts/slurm_train.sh CONFIG.yaml" in run_script("slurm_train.sh", "--help").stdout
    clean = {key: value for key, value in script_environment(sys.executable).items() if not key.startswith("SLURM_")}
    assert "this is for sbatch" in run_script("slurm_train.sh", "x.yaml", env=clean, status=1).stderr
    job = {**clean, "SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(tmp_path)}
    assert f"no {tmp_path}/scripts/train.sh: call sbatch in the checkout" in (
        run_script("slurm_train.sh", "x.yaml", env=job, status=1).stderr
    )


def test_slurm_train_needs_no_exported_variables(run_script, tmp_path):
    """Under sbatch --export=NONE, srun passes only Slurm's own variables on."""
    programs = {
        "bin/srun": 'while [ "${1#--}" != "$1" ]; do shift; done\n'
        'exec env -i PATH="$PATH" SLURM_NNODES=2 SLURM_NODEID=1 "$@"\n',
        "bin/scontrol": "printf 'one\\ntwo\\n'\n",
        "scripts/train.sh": 'printf "<%s>" "$@"\n',
    }
    for name, text in programs.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}", encoding="utf-8")
        path.chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "x", "SLURM_SUBMIT_DIR": str(tmp_path)}
    job["PATH"] = f"{tmp_path}/bin:{os.environ['PATH']}"
    done = run_script("slurm_train.sh", "a b.yaml", "--timeout", "5", env=job)
    assert done.stdout == "<--nodes><2><--node-rank><1><--rendezvous><one:20007><a b.yaml><--timeout><5>"
