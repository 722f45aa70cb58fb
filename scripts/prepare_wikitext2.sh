#!/usr/bin/env bash
# WikiText-2 (Merity et al. 2017), a small corpus for language models: text to fairseq's binary data.
#
#   scripts/prepare_wikitext2.sh [--data DIR] [--out DIR] [--mirror URL|DIR] [prepare_language_model.py options …]
#
#   --data DIR     folder that holds train.txt, valid.txt and test.txt, plain or .gz
#                  (without it they are downloaded to data/wikitext-2)
#   --out DIR      default data/wikitext2: raw/ data-bin/
#   --mirror PLACE address or folder to take the files from instead of GitHub
#
# The text is tokenised and its rare words are <unk> already: 2.09 million words to train on (with </s>), 33,278 different
# ones. Finished steps are not done again, whatever interrupted the last run.

# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# The copy in PyTorch's examples of 2025-08-25; the files themselves have not changed since 2017.
commit=77f55b912142e11fcfdf5b530231fb9c52f181e8
mirror=https://raw.githubusercontent.com/pytorch/examples/$commit/word_language_model/data/wikitext-2
data='' out=$ROOT/data/wikitext2 options=()
while [[ $# -gt 0 ]]; do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --data | --out | --mirror)
            [[ $# -ge 2 && -n $2 ]] || die "$1 needs a value"
            declare "${1#--}=$2"
            shift
            ;;
        *) options+=("$1") ;;
    esac
    shift
done

if [[ -z $data ]]; then
    data=$ROOT/data/wikitext-2
    while read -r checksum name; do
        download "$mirror/$name" "$data/$name" "$checksum"
    done <<'END'
2d84b35af79e411d73ea7cae83c73964c6ac83b4 train.txt
eec944eb2d9e46061cd34a6913528797db6842fc valid.txt
6f3fc88e4cd88456ea892971f9f12243e8428624 test.txt
END
fi
[[ -d $data ]] || die "no folder $data: --data is a folder with train.txt, valid.txt and test.txt (plain or .gz)"

use_python
"$PY" "$SCRIPTS/prepare_language_model.py" --raw "$data" --out "$out" "${options[@]}"
