"""One HTML page about trainings: learning curves, scores next to the papers', learned kernels, translations.

The page needs no network: its pictures are embedded. Files of a run that are missing or unreadable are listed on it.
"""
