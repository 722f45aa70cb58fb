"""Preparation of corpora: from published archives to fairseq's binary data, in steps that can be resumed.

Whatever is wrong with an option, a file or a text raises an InputError or its subclass CorpusError.
"""
