"""Parked engines: started ahead by one program, adopted by another that wants an engine of the same configuration."""
