"""Sequence-level knowledge distillation (Kim & Rush 2016): training text for a student, translated by a teacher."""
