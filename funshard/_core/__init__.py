"""The core: a policy, a spec, slices, gathers with their transposes, and a call, as data flow alone."""
