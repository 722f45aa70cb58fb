"""Long runs whose memory must stay flat: `scripts/soak.sh`."""
