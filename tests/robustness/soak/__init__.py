"""Long runs whose memory must stay flat: `scripts/dev/soak.sh`."""
