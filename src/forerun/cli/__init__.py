"""The command `forerun`: its flags, inputs and outputs. Only modules that compute, such as demo.py, import slowly."""
