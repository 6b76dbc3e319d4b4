"""The check that ranks start the same collectives, which compares them before each one: `check` and what it consists of."""
