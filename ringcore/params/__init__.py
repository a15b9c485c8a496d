"""What a request asks for and what it gets: plain values, checked where they are made."""
