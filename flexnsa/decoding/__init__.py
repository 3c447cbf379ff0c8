"""Keys and values that are kept from token to token, and where a step finds and puts them."""
