"""Text preparation as for the corpora: tokenisers, subwords, and the way back. Needs neither torch nor fairseq."""
