"""Preparation of corpora: from published archives to fairseq's binary data, in steps that can be resumed."""
