#!/usr/bin/env bash
# The name in 0.1.0 of: scripts/prepare.sh gbw [options]
exec "$(dirname "${BASH_SOURCE[0]}")/prepare.sh" gbw "$@"
