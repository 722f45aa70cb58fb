#!/usr/bin/env bash
# The name in 0.1.0 of: scripts/prepare.sh iwslt14_de_en [options]
exec "$(dirname "${BASH_SOURCE[0]}")/prepare.sh" iwslt14_de_en "$@"
