"""What a command of ours is as a process, the gateway's or the front end's. It knows neither of them."""
