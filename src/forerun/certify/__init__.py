"""`forerun certify`: whether this installation draws exactly as plain decoding does, with this pair of models."""
