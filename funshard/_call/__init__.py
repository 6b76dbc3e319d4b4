"""functional_call: a model on sharded parameters while it runs: call.py enters, modes.py chooses, running.py runs."""
