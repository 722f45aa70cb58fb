#!/usr/bin/env bash
# The name in 0.1.0 of: scripts/prepare.sh wikitext103 [options]
exec "$(dirname "${BASH_SOURCE[0]}")/prepare.sh" wikitext103 "$@"
