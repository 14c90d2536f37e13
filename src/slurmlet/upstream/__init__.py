"""Unmodified upstream programs: which versions, where found, how fetched or built."""
