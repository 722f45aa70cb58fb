#!/usr/bin/env bash
# WikiText-2 (Merity et al. 2017), a small corpus for language models: text to fairseq's binary data.
#
#   scripts/prepare_wikitext2.sh [--data DIR] [--out DIR] [--mirror URL|DIR] [--workers N] [--any-size]
#                                [prepare_language_model.py options …]
#
#   --data DIR     folder that holds train.txt, valid.txt and test.txt, plain or .gz
#                  (without it they are downloaded to data/wikitext-2)
#   --out DIR      default data/wikitext2: raw/ data-bin/
#   --mirror PLACE address or folder to take the files from instead of GitHub
#   --any-size     another text than WikiText-2: neither its checksums nor its size are compared
#
# The text is tokenised and its rare words are <unk> already: 2,088,628 tokens to train on (with </s>), 33,278 different
# ones. Finished steps are not done again, whatever interrupted the last run. 0.1 GiB.

# shellcheck source=scripts/prepare_lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/prepare_lib.sh"

prepare_options data/wikitext-2 data/wikitext2 "$@"
arguments=(--raw "$DATA" --out "$OUT" --workers "$WORKERS"
    --expect train:36718:2088628 --expect valid:3760:217646 --expect test:4358:245569 --expect-entries 33280
    "${OPTIONS[@]}")
check_options data.language_model "${arguments[@]}"

# The copy in PyTorch's examples of 2025-08-25; the files themselves have not changed since 2017.
commit=77f55b912142e11fcfdf5b530231fb9c52f181e8
address=https://raw.githubusercontent.com/pytorch/examples/$commit/word_language_model/data/wikitext-2
if ((!GIVEN_DATA)); then # files of one's own may be packed, and have other names
    need_disk 0.1 "$DATA" "$OUT"
    fetch "$address/train.txt" blob:2d84b35af79e411d73ea7cae83c73964c6ac83b4
    fetch "$address/valid.txt" blob:eec944eb2d9e46061cd34a6913528797db6842fc
    fetch "$address/test.txt" blob:6f3fc88e4cd88456ea892971f9f12243e8428624
fi

prepare data.language_model "${arguments[@]}"
