"""`forerun certify` checks whether this installation, with one target and drafter, draws exactly as plain decoding."""
