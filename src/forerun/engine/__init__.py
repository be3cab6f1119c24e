"""The engine: it turns requests into verified tokens, with one step, one scheduler and one continuous batch."""
