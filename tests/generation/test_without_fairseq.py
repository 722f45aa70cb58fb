"""Exported models translate where there is no fairseq: against a beam search written out over full passes."""

import math

import pytest
import torch

from lightconv_plugin.checkpoints.exported import load_model, open_exported
from lightconv_plugin.generation import BatchSearch, SearchOptions
from lightconv_plugin.generation.translator import Translator
from lightconv_plugin.mixers import MIXERS
from tests.checkpoints.exports import build_model, export, pair

LINES = ["w1 w2 w3 dog", "w7", "w9 w8 w7 w6 w5 w1 w1", "", "The dog"]
LONGEST = 9


def sharp(kind: str):
    """A model whose hypotheses differ clearly, and sometimes end."""
    model = build_model(pair(kind))
    with torch.no_grad():
        model.decoder.embed_tokens.weight.mul_(2)
        model.decoder.embed_tokens.weight[2].mul_(1.5)
    return model


def written_out(model, source, beam: int, lenpen: float):
    """Beam search by the rules that beam_search.py states; (words, score) of each finished hypothesis, best first."""
    alive, finished = [((2,), 0.0)], []
    for step in range(LONGEST + 1):
        candidates = []
        for words, score in alive:
            logits = model(source.unsqueeze(0), torch.tensor([words])).logits[0, -1]
            chances = logits.log_softmax(0)
            chances[1] = -math.inf
            if step < 1:
                chances[2] = -math.inf
            if step == LONGEST:
                chances[:2] = chances[3:] = -math.inf
            candidates += [(score + float(chances[word]), (*words, word)) for word in range(len(chances))]
        candidates.sort(key=lambda candidate: -candidate[0])
        best = candidates[: 2 * beam]
        for score, words in best[:beam]:
            if words[-1] == 2 and score > -math.inf and len(finished) < beam:
                finished.append((words[1:], score / (step + 1) ** lenpen))
        if len(finished) >= beam or step == LONGEST:
            break
        alive = [(words, score) for score, words in best if words[-1] != 2][:beam]
    return sorted(finished, key=lambda hypothesis: -hypothesis[1])


@pytest.mark.parametrize("mixer", MIXERS)
@torch.no_grad()
def test_the_search_on_a_plain_model(mixer):
    model = sharp(mixer)
    source = torch.tensor([[1, 1, 5, 6, 2], [9, 8, 7, 6, 2], [1, 1, 1, 4, 2]])
    options = SearchOptions(pad=1, unk=3, eos=2, beam_size=3, len_penalty=0.7, max_len_b=LONGEST, threads=1)
    found = BatchSearch([model], options).search(source)
    for row, ranked in zip(source, found, strict=True):
        expected = written_out(model, row[row != 1], 3, 0.7)
        assert [tuple(hypothesis["tokens"].tolist()) for hypothesis in ranked] == [words for words, _ in expected]
        assert [float(hypothesis["score"]) for hypothesis in ranked] == pytest.approx(
            [s for _, s in expected], abs=1e-4
        )


@torch.no_grad()
def test_a_directory_from_text_to_text(tmp_path):
    directory = export(tmp_path / "model", sharp("dynamic"))
    exported = open_exported(directory)
    model = load_model(exported)
    encode = exported.source_text.encode()
    with Translator(directory, beam=2, max_len_b=LONGEST, dtype="float32") as translator:
        translations = translator.translate(LINES, 2)
    assert [translation.source for translation in translations] == LINES
    assert translations[3].text == ""
    for line, translation in zip(LINES, translations, strict=True):
        if line:
            source = torch.tensor([*map(exported.source.index, encode(line)), 2])
            expected = written_out(model, source, 2, 1.0)
            pieces = [tuple(exported.target[word] for word in words[:-1]) for words, _ in expected]
            assert [hypothesis.tokens for hypothesis in translation.hypotheses] == pieces
            scores = [score / math.log(2) for _, score in expected]
            assert [hypothesis.score for hypothesis in translation.hypotheses] == pytest.approx(scores, abs=1e-4)
