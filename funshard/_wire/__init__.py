"""A unit's way between ranks: stages from slice to buffer, and the folds that run them."""
