"""The files of a checkpoint: formats, checked readers and writers, and the directory that they are committed to."""
