"""From a model and its tasks to a split: what each task uses, what becomes a part, and the files of it."""
