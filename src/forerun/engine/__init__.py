"""Turns requests into verified tokens. An engine has one step function, one scheduler and one continuous batch."""
