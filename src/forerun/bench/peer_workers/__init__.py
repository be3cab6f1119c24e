"""Scripts that `forerun bench peers` runs inside the environments of other engines; they import nothing of forerun."""
