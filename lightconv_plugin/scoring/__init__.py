"""BLEU, chrF, ROUGE, perplexity and significance, parsing of fairseq's logs, and the papers' scores."""
