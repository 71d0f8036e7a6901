"""How a card is reached: attaching, and supervising the soft card."""
