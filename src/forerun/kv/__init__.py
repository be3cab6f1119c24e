"""What a model remembers: block tables over one pool of keys and values."""
