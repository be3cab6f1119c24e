"""`forerun certify`: whether this installation, with this pair of models, says exactly what plain decoding says."""
