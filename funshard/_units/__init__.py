"""One unit: where its parameters lie in its buffer, and how that travels between ranks."""
