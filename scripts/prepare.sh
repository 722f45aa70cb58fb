#!/usr/bin/env bash
# Prepare the data of a task: from published archives, or your own text, to fairseq's binary data.
#
#   scripts/prepare.sh TASK [options]
#
# --help lists the tasks; TASK --help has the task's options, steps and disk space. Run the same command again to resume.

# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
be_lightconv prepare "$@"
