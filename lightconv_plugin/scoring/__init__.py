"""BLEU, chrF, ROUGE, perplexity, significance, fairseq's logs they are read from, and the scores of the papers."""
