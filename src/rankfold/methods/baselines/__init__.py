"""Methods that rankfold is compared with."""
