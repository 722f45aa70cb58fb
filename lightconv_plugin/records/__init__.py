"""Records of a training: records.jsonl next to its checkpoints, one JSON object a line.

    {"record": "start", "update": 0, "settings": {…}, "parameters": …, "processes": …, …}
    {"record": "operators", "backend": "cpu"}
    {"record": "statistics", "part": "train/inner", "epoch": 1, "update": 100, "values": {"loss": …, "wps": …}}
    {"record": "statistics", "part": "valid", "epoch": 1, "update": 500, "values": {"loss": …}}
    {"record": "end"}

Every start of the command adds a start, with the update that it resumes from; 0 is a new training. The values are those
of fairseq's log, under its names. An end has an `error` if the training failed; without an end it was killed.

compat/recording.py writes them; file.py reads them, or reads an old run's log by fairseq_log.py; trainings.py makes
curves and facts of them.
"""
