"""What is done with slices where they lie: without padding, drawn at random, averaged, checked."""
