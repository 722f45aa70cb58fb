"""Text as corpora prepare it: tokenisers, subwords, and the way back. Needs neither torch nor fairseq."""
