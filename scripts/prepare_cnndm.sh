#!/usr/bin/env bash
# CNN/Daily Mail, summarisation (Hermann et al. 2015; not anonymised, as See, Liu & Manning 2017): stories to fairseq's data.
#
#   scripts/prepare_cnndm.sh [--data DIR] [--out DIR] [--mirror URL|DIR] [--workers N] [--any-size] [--bpe N]
#
#   --data DIR     folder that holds cnn_stories.tgz, dailymail_stories.tgz, all_train.txt, all_val.txt and all_test.txt
#                  (without it they are downloaded to data/cnndm/download: 0.6 GB). The archives are those that
#                  https://cs.nyu.edu/~kcho/DMQA/ offers, the lists those of github.com/abisee/cnn-dailymail
#   --out DIR      default data/cnndm: raw/ tok/ bpe/ data-bin/
#   --mirror PLACE address or folder to take these five files from
#   --any-size     other stories of that form: neither checksums nor numbers of stories are compared
#   --bpe N        merges, learned on articles and summaries together (default 30000)
#
# Articles are whole here; the configurations cut them to 400 tokens. A summary is its highlights one after the other, each
# with its full stop, by which ROUGE tells its sentences (`lightconv score --metric rouge`). Enforced: 287,113 stories for
# training, 13,368 for validation, 11,490 for test, those of See et al. less the 114 without an article.
#
# What differs from See et al.: their tokeniser is Stanford's PTBTokenizer, a Java program; this is Moses' (sacremoses, without
# its escapes). Moses writes do n't as don 't, -lrb- as (, `` and '' as ", and leaves "cannot" one word; a paragraph that ends
# with a bracket gets no full stop, theirs does. Published ROUGE is of PTB tokens: to compare, tokenise both sides so.
#
# Room: 0.6 GB of archives and lists, 2 × 1.4 GB of stories (raw/, and once more while they are put in order), 1.5 GB tokenised,
# 1.8 GB encoded, 2 × 0.6 GB of 2-byte tokens (data-bin/, and the workers' shares of it): 7.9 GB, 8 GiB wanted.
# Finished steps are not done again, whatever interrupted the last run.

# shellcheck source=scripts/prepare_lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/prepare_lib.sh"

prepare_options data/cnndm/download data/cnndm "$@"
arguments=(--stories "$DATA/cnn_stories.tgz" "$DATA/dailymail_stories.tgz" --lists "$DATA" --out "$OUT"
    --workers "$WORKERS" "${OPTIONS[@]}")
check_options data.cnndm "${arguments[@]}"
need_disk 8 "$OUT"

# The archives' checksums are those TensorFlow Datasets has for their first place, Google Drive; so are those of the lists.
stories=https://huggingface.co/datasets/cnn_dailymail/resolve/11343c3752184397d56efc19a8a7cceb68089318/data
lists=https://raw.githubusercontent.com/abisee/cnn-dailymail/b15ad0a2db0d407a84b8ca9b5731e1f1c4bd24b9/url_lists
fetch $stories/cnn_stories.tgz sha256:e8fbc0027e54e0a916abd9c969eb35f708ed1467d7ef4e3b17a56739d65cb200
fetch $stories/dailymail_stories.tgz sha256:ad69010002210b7c406718248ee66e65868b9f6820f163aa966369878d14147e
fetch $lists/all_train.txt sha256:a5cee49f3a6c862c26ce29308236d2a99625ab6c86a43be22d5206b2790d8029
fetch $lists/all_val.txt sha256:81887e982b045083409c6ee838aede8ff4b97291605bcfb21bffc456a16991db
fetch $lists/all_test.txt sha256:c4f5efb5ec2126430a5c156efbd13d0e9c4cb490169e552c38b4a51981a009bd

prepare data.cnndm "${arguments[@]}"
