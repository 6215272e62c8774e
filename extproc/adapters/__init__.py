"""Talk: each module speaks with one outside thing and knows no other adapter."""
