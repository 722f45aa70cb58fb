"""One HTML page about trainings: learning curves, scores beside the papers', learned kernels, translations.

The page needs no network: its pictures are in it. What a run lacks, and what of it cannot be read, is said on the page.
"""
