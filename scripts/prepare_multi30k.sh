#!/usr/bin/env bash
# Multi30k (task 1, English–German): raw text to fairseq's binary data.
#
#   scripts/prepare_multi30k.sh [--data DIR] [--out DIR] [--mirror URL|DIR] [--workers N] [prepare_text.py options …]
#
#   --data DIR     folder that holds train, val and test_2016_flickr .en and .de, plain or .gz
#                  (without it they are downloaded to data/multi30k)
#   --out DIR      default data/multi30k_en_de: raw/ tok/ bpe/ data-bin/
#   --mirror PLACE address or folder to take the raw files from instead of GitHub
#   --any-size     files of other content than the published ones, from a mirror
#   --workers N    processes (default: all cores)
#
# Punctuation normalised, Moses-tokenised, lower-cased, 4,000 joint BPE merges (29,000 sentences are too few for the usual
# 10,000), joined dictionary, English → German. `prepare_text.py --help` has more options (--src de --tgt en, --bpe N, …).
# Finished steps are not done again, whatever interrupted the last run. test_2017_flickr and test_2017_mscoco, where they
# are there, become test1 and test2.

# shellcheck source=scripts/prepare_lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/prepare_lib.sh"

# multi30k/dataset of 2026-07-07; the files themselves have not changed since 2018.
commit=a3d2e0d26b56f3846f66a952536ffed4e401d05a
prepare_options data/multi30k data/multi30k_en_de "$@"
options=()
for option in "${OPTIONS[@]}"; do
    # heeded by fetch; prepare_text.py knows nothing of sizes
    if [[ $option != --any-size ]]; then options+=("$option"); fi
done

arguments=(--raw "$DATA" --out "$OUT" --src en --tgt de --workers "$WORKERS" --bpe 4000
    --train-prefix train --valid-prefix val)
check_options data.parallel_text "${arguments[@]}" "${options[@]}"

if ((!GIVEN_DATA)); then
    need_disk 0.1 "$DATA" "$OUT"
    # SHA-256 of the text inside each .gz
    while read -r sha256 name; do
        fetch "https://raw.githubusercontent.com/multi30k/dataset/$commit/data/task1/raw/$name.gz" "text:$sha256"
    done <<'END'
460a15fbd157e34a7a9957ee388c1ca247fe47af3ef25fb50442af6c274e0fc6 train.en
2c2b73fd2b548fbcde3a875e0a78d6ee94d498bfdee6bd3eae3945779e9ddf72 train.de
1f2a23d992769b5b3d209b0a10dd0b77c08cceb1f20dfb97ed0aafa49d107227 val.en
660e09eb7e1da2f856ea13ee5ad3cf6d36b3d5b0b733c857e94c5747a3dfc660 val.de
399a4382932c1aadd3ceb9bef1008d388a64c76d4ae4e9d4728c6f4301cac182 test_2016_flickr.en
4be6b5b3236b79c25475c6bb829800a7ce559e9ba7a1f6c2394fe4d40be46d16 test_2016_flickr.de
ce1450ddc5ab0834502579d77a170849952e15a2938b34cc503bdc25ebb4fb98 test_2017_flickr.en
c3078bc3b36808bf9d20eb2347ed6137016179ef59ec0d2b9b8ecc3fb2880081 test_2017_flickr.de
43051fdfa86fd5395182e718a94ca67b1b227b9f7c79596ff0f6b813216981d2 test_2017_mscoco.en
58277df3c75f92f7145a11b910b553d1cf82c439249d4dc237c899609eafac22 test_2017_mscoco.de
END
fi

tests=test_2016_flickr
for name in test_2017_flickr test_2017_mscoco; do
    if (cd -- "$DATA" && compgen -G "$name.*" >/dev/null); then tests+=,$name; fi
done
prepare data.parallel_text "${arguments[@]}" --test-prefix "$tests" "${options[@]}"
