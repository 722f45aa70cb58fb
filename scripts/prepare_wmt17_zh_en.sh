#!/usr/bin/env bash
# The name in 0.1.0 of: scripts/prepare.sh wmt17_zh_en [options]
exec "$(dirname "${BASH_SOURCE[0]}")/prepare.sh" wmt17_zh_en "$@"
