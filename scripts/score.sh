#!/usr/bin/env bash
# The old name of scripts/evaluate.sh: `lightconv score` scores files that exist. It is gone in version 0.3.
echo "scripts/score.sh is now scripts/evaluate.sh; the old word is gone in version 0.3" >&2
exec "$(dirname "${BASH_SOURCE[0]}")/evaluate.sh" "$@"
