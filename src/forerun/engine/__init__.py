"""Requests in, verified tokens out: one step, one scheduler, one continuous batch."""
