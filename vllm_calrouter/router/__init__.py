"""What runs in the API server: a request's two legs, and the books about them."""
