"""BLEU, chrF, ROUGE, perplexity, significance, and fairseq's logs they are read from."""
