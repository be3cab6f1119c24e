"""What runs inside the environments of other engines for `forerun bench peers`; imports nothing of forerun."""
