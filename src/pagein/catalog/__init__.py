"""What a model is and needs: headers, estimates, remembered peaks."""
