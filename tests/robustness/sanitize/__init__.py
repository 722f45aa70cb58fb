"""The CPU extension compiled with gcc's sanitizers and run by the fuzzer's cases: `scripts/dev/sanitize.sh`."""
