"""The user's own parallel text: the steps of parallel_text.py; missing validation and test sets can be held out."""

ABOUT = """Your own parallel text, of any two languages

--data is a folder with plain text or .gz, one sentence per line, one file per language:
train.XX, valid.XX (or val.XX, dev.XX), test*.XX, or other names given by --train-prefix,
--valid-prefix and --test-prefix. --valid-lines and --test-lines hold out pairs of the training
text instead. Written: raw/ tok/ bpe/ data-bin/ and corpus.json, which records the text steps for
`lightconv translate` and `lightconv export`.

Punctuation is normalised, text tokenised by Moses' rules, case kept; joint BPE, one dictionary;
training pairs of 1 to 250 pieces with a ratio of at most 9 are kept.

example:
  lightconv prepare parallel --data my_files --src de --tgt en --name mine --test-lines 2000
  lightconv train multi30k_en_de/dynamicconv task.data=data/mine/data-bin \\
      task.source_lang=de task.target_lang=en checkpoint.save_dir=runs/mine
"""
